"""TRL trains a small model to play Wordle, and thinwire moves its weights to the servers."""
