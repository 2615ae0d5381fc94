"""Training: experiments, the loop, its step, checkpoints, and the folder of a run."""
