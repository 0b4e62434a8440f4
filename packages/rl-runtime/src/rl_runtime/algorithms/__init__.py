"""What is learnt from a group of rollouts: rewards, advantages, losses; pure functions."""
