"""Agents: mini-swe-agent, a scripted one for tests, and any program that takes an OpenAI URL."""
