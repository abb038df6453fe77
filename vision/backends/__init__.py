"""What runs the picture encoder: one protocol, one file each."""
