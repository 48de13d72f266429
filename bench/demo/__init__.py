"""The demo: chats and documents on a real server, with the plugin and without."""
