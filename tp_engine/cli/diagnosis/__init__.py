"""What ``tp-engine doctor`` looks at."""
