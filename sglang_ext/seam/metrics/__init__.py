"""What `/metrics` and `/server_info` say of the plugin: names and units, and the reporter."""
