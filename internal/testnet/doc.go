// Package testnet provides networks for tests: hosts in separate network namespaces, joined by a switch. It works on
// Linux only.
package testnet
