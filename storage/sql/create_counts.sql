-- Whether an entry of an attempt of the Trainer for a step counts: no later attempt resumed from before that step. The same
-- rule in Python is counts of storage/attempts.py. Rows of another program's file have no step, or one that no path can have.
-- Callers name the table of each argument: DuckDB puts the macro's text in the place of the call, where a bare `attempt`
-- would be a column of `later`.
CREATE MACRO counts(of_attempt, at_step) AS at_step BETWEEN 0 AND 99_999_999 AND NOT EXISTS (
    SELECT 1 FROM stored_attempts AS later WHERE later.attempt > of_attempt AND later.resumed_from < at_step
);
