"""A machine and what runs on it: the local stack, processes, a local S3. Imports storage, neither flows nor tba."""
