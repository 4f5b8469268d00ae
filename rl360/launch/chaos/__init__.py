"""`rl360 chaos`: kill -9 at seeded moments over short runs, and a check that nothing is lost or done twice."""
