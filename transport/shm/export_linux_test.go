package shm

// OpenFrames is Open where there is no shared memory.
var OpenFrames = openFrames

// Address returns the name of a group's socket.
func Address(name string) string { return address(name).Name }
