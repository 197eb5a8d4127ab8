"""How versions come to exist: keys, records and decisions. Everything here is pure."""
