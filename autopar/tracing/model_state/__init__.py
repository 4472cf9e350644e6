"""What a forward reads of its model beside its arguments, and what it leaves there."""
