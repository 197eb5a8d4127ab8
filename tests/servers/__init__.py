"""Real servers that tests start on 127.0.0.1 and stop again, and the faults between."""
