"""What commands and monitors print in a terminal of 80 columns."""
