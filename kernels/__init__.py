"""What runs inside the engine's processes."""
