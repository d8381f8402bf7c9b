package plan

// Algorithms is the table of all algorithms, in the order in which the chooser prefers them where their costs
// are equal. It must not be changed. docs/algorithms.md explains each algorithm.
var Algorithms = []Algorithm{
	direct,
	eager,
	staged,
	directFrames,
	recursiveDoubling,
	rabenseifner,
	doubleTree,
	hierarchical,
	hierarchicalLong,
	reduceBroadcast,
	ring,
}

// FindAlgorithm returns the algorithm with this name.
func FindAlgorithm(name string) (Algorithm, bool) {
	for _, a := range Algorithms {
		if a.Name == name {
			return a, true
		}
	}
	return Algorithm{}, false
}
