-- One row a life of the Trainer.
CREATE VIEW attempts AS
SELECT * FROM stored_attempts;

COMMENT ON VIEW attempts IS 'One row a life of the Trainer.';
COMMENT ON COLUMN attempts.attempt IS 'Counted from 1.';
COMMENT ON COLUMN attempts.resumed_from IS 'Step of the checkpoint it went on from; 0 where it began from scratch.';
COMMENT ON COLUMN attempts.host IS 'Machine of the Trainer.';
COMMENT ON COLUMN attempts.pid IS 'Process of the Trainer.';
COMMENT ON COLUMN attempts.created_at IS 'When it began, UTC.';
