// Package layers holds the tests of the project's structure: which package may import which, and that the contracts
// between them keep their shape; of its pages; and of the width of its lines. It contains only tests.
package layers
