"""A run's journal as something to keep: read from where it lies, carried in one file, kept within bounds.

source      where events are read from: a server over the run's stream, or an imported archive
"""
