"""A Searcher's start and name, and the policies that it serves."""
