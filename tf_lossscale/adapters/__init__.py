"""What differs per optimizer family, one file each."""
