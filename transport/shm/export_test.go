package shm

// OpenFrames is Open where there is no shared memory.
var OpenFrames = openFrames
