"""What moves bytes, one file each; nothing above knows which one runs."""
