-- One row for each attempt of the Trainer.
CREATE VIEW attempts AS
SELECT * FROM stored_attempts;

COMMENT ON VIEW attempts IS 'One row for each attempt of the Trainer: its first start, and each resume.';
COMMENT ON COLUMN attempts.attempt IS 'Number of the attempt, from 1.';
COMMENT ON COLUMN attempts.resumed_from IS 'Step of the checkpoint that it resumed from; 0: from scratch.';
COMMENT ON COLUMN attempts.host IS 'Host name of the Trainer''s machine.';
COMMENT ON COLUMN attempts.pid IS 'Process id of the Trainer.';
COMMENT ON COLUMN attempts.created_at IS 'Time at which the attempt began, UTC.';
