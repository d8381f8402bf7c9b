// Package secret derives all keys and certificates that the workers of a job need to authenticate each other
// from one shared text: the job's secret.
//
// [New] generates a secret; [Parse] and [FromEnvironment] read an existing one. From it every worker derives,
// with HKDF (RFC 5869):
//
//   - [Secret.TLS]: a certificate authority for the job and a certificate for this worker, for mutual TLS 1.3
//     between hosts;
//   - [Secret.Authenticate]: a mutual HMAC challenge, with which every connection of the job starts, whether over TCP
//     or a unix socket.
//
// None of these are configured, exchanged or stored: every process with the secret belongs to the job, and no
// other process does. docs/security.md describes what this protects against and what it does not.
package secret
