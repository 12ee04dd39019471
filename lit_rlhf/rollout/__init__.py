"""On-policy rollouts: what is learned from, and how it is cut into optimizer steps."""
