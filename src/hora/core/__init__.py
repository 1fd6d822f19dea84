"""What needs no framework: errors, settings, world, run directory, events, progress."""
