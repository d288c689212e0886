"""Lakes in object stores."""
