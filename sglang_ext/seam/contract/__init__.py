"""What the plugin takes for granted of SGLang, and whether an installed release keeps to it."""
