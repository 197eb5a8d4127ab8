"""Applying updates to what serves tokens."""
