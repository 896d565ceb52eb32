"""A Searcher's start and name, the policies that it serves, and its look at the Trainer."""
