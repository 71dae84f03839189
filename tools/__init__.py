"""Commands for developers; see README.md."""
