"""The command line: `tba X` is in X.py; `up` and `down` are in stack.py, `stop` and `searchers` in steer.py."""
