package shm

// checkPrivate returns nil: a user's directory for temporary files is private.
func checkPrivate(string) error { return nil }
