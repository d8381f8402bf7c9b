// Package pictures makes the pictures of the documentation, by a test: see docs/pictures/make.
package pictures
