"""Measuring trained models."""
