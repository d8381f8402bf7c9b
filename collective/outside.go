package collective

// What follows is for other implementations of [Communicator], such as those over MPI and NCCL.

// Check returns how many elements the whole vector of the call has for a rank of so many, or what is wrong with the call by itself.
func (c *Call) Check(rank, size int) (count int, err error) {
	o := Options{}
	if c.Options != nil {
		o = *c.Options
	}
	return c.check(rank, size, &o)
}

// Part returns which elements [lo, hi) of a vector of count elements are the part of a rank of so many. The call must be one
// that Check has accepted.
func (c *Call) Part(rank, size, count int) (lo, hi int) { return c.part(rank, size, count) }

// Fill returns the configuration with its defaults, or what is wrong with it.
func (c Config) Fill() (Config, error) { return c.filled() }
