"""Plans a run from the times of another one: how many Searchers feed a Trainer."""
