"""Mutation testing: faults put into the code one at a time, and the tests that must see them."""
