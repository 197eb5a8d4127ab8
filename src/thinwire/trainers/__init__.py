"""Taking weights out of something that trains."""
