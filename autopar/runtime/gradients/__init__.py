"""Gradients of a planned model: when they are reduced, what adds them up, and what hooks and loops do with them."""
