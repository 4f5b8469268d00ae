"""RL360: reinforcement learning of coding agents, every step of it in one journal that can be replayed."""

__version__ = "0.1.0"
