"""The Pythons that the plugin runs on: where they are, and its tests under each of them."""
