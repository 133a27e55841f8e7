"""Scripts that show the adapters at work."""
