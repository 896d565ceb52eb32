-- Whether what an attempt of the Trainer did at a step counts: no later attempt resumed from before that step. In Python:
-- counts of storage/attempts.py. A row of a file of another program has no step, or one that no path can have. The arguments need their table's name, because a macro's text takes the place of its call.
CREATE MACRO counts(of_attempt, at_step) AS at_step BETWEEN 0 AND 99_999_999 AND NOT EXISTS (
    SELECT 1 FROM stored_attempts AS later WHERE later.attempt > of_attempt AND later.resumed_from < at_step
);
