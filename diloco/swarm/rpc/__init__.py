"""What peers ask each other: one file a question, both sides."""
