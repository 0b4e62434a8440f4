"""Train on the distribution that was sampled."""
