"""Adapters to frameworks, each imported by its users only; a framework is needed where its adapter is imported."""
