"""A Searcher's start, and the policies that it serves."""
