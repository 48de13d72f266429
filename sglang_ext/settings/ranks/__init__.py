"""Which ranks are served beside tensor parallel ones: pipeline stages, context parallel ranks."""
