-- The role of Vectormill's processes, made by the image of Postgres when it fills a new volume (docker-compose.yml).
--
-- It owns its database, and so makes its schema and the tables and views of collections; beyond that database it may do
-- nothing. pgvector can only be enabled by a superuser. The superuser is left without a password, so that nobody becomes it
-- through the network: `docker compose exec postgres psql -U postgres vectormill` does, inside of the container.

\getenv password POSTGRES_PASSWORD
CREATE ROLE vectormill LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS PASSWORD :'password';
ALTER DATABASE :"DBNAME" OWNER TO vectormill;
CREATE EXTENSION vector SCHEMA public;
ALTER ROLE CURRENT_USER PASSWORD NULL;
