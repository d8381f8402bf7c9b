// Package layers holds the tests of the project's structure: which package may import which, and that the contracts
// between them keep their shape. It contains only tests.
package layers
