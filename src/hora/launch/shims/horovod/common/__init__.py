"""``horovod.common``: what does not depend on a framework."""
