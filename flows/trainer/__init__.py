"""The Trainer's process: `python -m flows.trainer`."""

ALREADY_TRAINING = 75  # its exit status: the run has another Trainer (EX_TEMPFAIL of sysexits.h)
